# The server in an image, for a CPU:
#     docker build -t slipstream .
#     docker run --rm -p 127.0.0.1:8000:8000 -v /path/to/model:/models:ro slipstream
# For NVIDIA GPUs, with the container toolkit on the host:
#     docker build -t slipstream:cuda --build-arg DEVICE=cu130 .
#     docker run --rm --gpus all -p 127.0.0.1:8000:8000 -v /path/to/model:/models:ro slipstream:cuda
# docs/deploying.md says more. `python -m tests.deployment.image` builds it without Docker and asks it a question.
ARG BASE=docker.io/library/debian:bookworm-slim
FROM ${BASE}

# g++ stays: Inductor compiles a model's functions for its shapes when it is loaded. Triton compiles a launcher for each
# kernel, which needs Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# A name of PyTorch's index of wheels: cpu, or a version of CUDA such as cu130.
ARG DEVICE=cpu
# Where pip looks for torch before PyPI; empty: nowhere else.
ARG TORCH_INDEX=https://download.pytorch.org/whl/${DEVICE}
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /app

# Dependencies first: a change of the sources does not install them again.
COPY pyproject.toml LICENSE ./
RUN mkdir src && touch README.md src/__init__.py \
    && python3 -m venv /opt/venv \
    && PIP_EXTRA_INDEX_URL=${TORCH_INDEX} pip install --no-cache-dir -e '.[otel,sentencepiece]'

COPY src src
COPY configs configs
# Kernels of every instruction set, whatever this machine's: a start takes those of its processor. And byte code, which
# the server's user may not write.
RUN python -m src.ops.build.prebuild && python -m compileall -q src

# A numeric user, so that Kubernetes can tell that it is not root.
RUN useradd --uid 10001 --user-group --create-home slipstream \
    && install -d -o slipstream -g slipstream /cache /models
USER 10001:10001
# Compiled functions of models. The process makes the folder inside it, so that nobody else may write to that.
VOLUME /cache
ENV SLIPSTREAM_CACHE_DIR=/cache/slipstream \
    HF_HOME=/cache/huggingface \
    SLIPSTREAM_CONFIG=/app/configs/container.toml \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

EXPOSE 8000
STOPSIGNAL SIGTERM
# For Docker and Compose; Kubernetes has probes of its own. Any answer but 200 is a fault once loading is over.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
# Without a shell, so that the server is process 1 and gets the signals itself.
ENTRYPOINT ["python", "-m", "src"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
