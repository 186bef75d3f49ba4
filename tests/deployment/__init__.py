"""The Dockerfile, the manifests for Kubernetes, the compose file and what they name."""
