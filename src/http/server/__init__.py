"""One HTTP request and its answer: who may ask, bodies, errors, the application's life."""
