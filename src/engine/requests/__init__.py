"""A request's way in and out: prompts, preparation, submission, streams."""
