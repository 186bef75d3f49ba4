"""What an engine tells its operators: metrics under known names, and logs."""
