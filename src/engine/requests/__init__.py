"""A request before and after the scheduler: prompts, preparation, submission, streams."""
