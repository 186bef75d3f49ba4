"""What an engine reports to its operators: metrics, traces and logs."""
