# syntax=docker/dockerfile:1
# The service and the re-index job in one image: no torch, no compiler, not root.
#
#   docker build -t care-search:local .                     CPU, the default target: `serve`
#   docker build -t care-search:gpu --target gpu .          the libraries for an NVIDIA GPU; see there
#   docker run -p 127.0.0.1:8000:8000 -v care:/app/var/collection care-search:local
#   docker run --rm -v care:/app/var/collection care-search:local index build examples/corpus.jsonl --publish

FROM python:3.11-slim AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE cli.py ./
COPY models models
COPY indexer indexer
COPY service service
# The example corpus, to which a link in the indexer points.
COPY examples examples
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .


FROM python:3.11-slim AS environment
RUN python -m venv --without-pip /opt/care
COPY requirements/serve.lock ./
# Wheels only: what would have to be compiled fails here and not on a machine without a compiler.
RUN pip --python /opt/care/bin/python install --no-cache-dir --require-hashes --only-binary :all: -r serve.lock
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/care/bin/python install --no-cache-dir --no-deps --no-index /wheels/*.whl


# Written by reading, never built: CUDA 13 for onnxruntime-gpu and faiss-gpu-cuvs, whose versions no lock holds yet.
# x86_64 only. The bundled encoder has a graph for processors alone: CARE_DEVICE=cuda needs another CARE_ENCODER.
FROM nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04 AS gpu
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/care
COPY --from=wheel /wheels /wheels
RUN /opt/care/bin/pip install --no-cache-dir --only-binary :all: "$(echo /wheels/*.whl)[gpu]"
RUN groupadd --gid 10001 care \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin care \
    && install -d -o 10001 -g 10001 /app/var/collection
WORKDIR /app
COPY examples examples
ENV PATH=/opt/care/bin:$PATH PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1 CARE_HOST=0.0.0.0 CARE_PORT=8000
USER 10001:10001
VOLUME /app/var/collection
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as http; http.build_opener(http.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"CARE_PORT\"]}/livez', timeout=4)"]
ENTRYPOINT ["care"]
CMD ["serve"]


FROM python:3.11-slim AS serve
# A fixed number, so that a volume's owner is known outside. A new named volume takes the folder's owner over.
RUN groupadd --gid 10001 care \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin care \
    && install -d -o 10001 -g 10001 /app/var/collection
COPY --from=environment /opt/care /opt/care
WORKDIR /app
COPY examples examples
# ONNX Runtime reports its use to its maker unless told not to, and keeps a device id under HOME for it.
ENV PATH=/opt/care/bin:$PATH PYTHONUNBUFFERED=1 ORT_DISABLE_TELEMETRY=1 CARE_HOST=0.0.0.0 CARE_PORT=8000
USER 10001:10001
VOLUME /app/var/collection
EXPOSE 8000
# Alive, not ready: a service that waits for its first snapshot is healthy. Past any proxy that the container inherits.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as http; http.build_opener(http.ProxyHandler({})).open(f'http://127.0.0.1:{os.environ[\"CARE_PORT\"]}/livez', timeout=4)"]
ENTRYPOINT ["care"]
CMD ["serve"]
