"""Endpoints for whoever runs the server: health, load, metrics, models, adapters, debugging."""
