# One image for every process: mainspring clock, worker, doctor, …
#
#   docker build --target workers -t mainspring .                                                    CPU
#   docker build --target workers -t mainspring --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .   CUDA
#   docker build --target light -t mainspring:light .          clock and command line only, without torch

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS venv
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/mainspring/bin:$PATH
RUN python -m venv /opt/mainspring
WORKDIR /src
COPY constraints.txt ./

FROM venv AS build-light
COPY pyproject.toml README.md LICENSE ./
COPY broker broker
COPY clock clock
COPY workers workers
COPY sdk sdk
COPY ops/mainspring_ops ops/mainspring_ops
RUN pip install -c constraints.txt .

# torch first and alone, so that a change of our own code does not fetch it again.
FROM venv AS build-workers
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY broker broker
COPY clock clock
COPY workers workers
COPY sdk sdk
COPY ops/mainspring_ops ops/mainspring_ops
RUN pip install -c constraints.txt '.[workers]'

FROM python:${PYTHON}-slim AS runtime
ENV PATH=/opt/mainspring/bin:$PATH PYTHONUNBUFFERED=1
# The storage volume takes over owner and mode of this folder when it is first mounted.
RUN useradd --system --uid 10001 --user-group mainspring \
 && install -d -o mainspring -g mainspring /var/lib/mainspring
USER mainspring
WORKDIR /var/lib/mainspring
ENTRYPOINT ["mainspring"]

FROM runtime AS light
COPY --from=build-light /opt/mainspring /opt/mainspring

FROM runtime AS workers
COPY --from=build-workers /opt/mainspring /opt/mainspring
