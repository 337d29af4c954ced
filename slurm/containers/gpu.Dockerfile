# The GPU environment: actor, reward server and TensorRT-LLM in one image, on NVIDIA's own, with nothing in it patched.
#
#   docker build -f slurm/containers/gpu.Dockerfile -t reinforce_rl:gpu .
#   enroot import -o reinforce_rl.sqsh dockerd://reinforce_rl:gpu            (for pyxis)
#
# With Transformer Engine or flash-attn, where the base has none (source that may compile for an hour against its torch):
#   --build-arg WITH='transformer-engine[core_cu13,pytorch]'
#
# Built from the repository's root. Another base with torch for CUDA and Python 3.10 or 3.12 will do as well, e.g.
# --build-arg BASE=nvcr.io/nvidia/pytorch:25.10-py3; then there is no TensorRT-LLM, and generation=native is used.
ARG BASE=nvcr.io/nvidia/tensorrt-llm/release:1.2.1
FROM ${BASE}
ARG WITH=

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

WORKDIR /opt/reinforce_rl
COPY pyproject.toml README.md ./
COPY constraints/gpu.txt constraints/
COPY reinforce_rl reinforce_rl
COPY examples examples
COPY conf conf
COPY slurm slurm
# What the base brings stays as it is: its own versions are constraints, and pip fails where ours cannot agree with
# them, rather than replace a torch that was built for this base. Local versions (2.9.0a0+145a3a7.nv25.10) cannot be
# looked up in an index, so pip must find them installed, as it does.
RUN python3 -m pip list --format=freeze \
        | grep -viE '^(reinforce-rl|pip|setuptools|wheel)==' > /tmp/base.txt \
    # Of our pins only those of packages that the base has not: two constraints on one package cannot both hold.
    && awk -F== '/^#/ {next} {name = tolower($1); gsub(/[-_.]+/, "-", name)} NR == FNR {has[name]; next} \
        !(name in has)' /tmp/base.txt constraints/gpu.txt > /tmp/rest.txt \
    && python3 -m pip install -c /tmp/base.txt -c /tmp/rest.txt -e '.[server,tensorboard,wandb]' \
    && { [ -z "${WITH}" ] || \
        python3 -m pip install --no-build-isolation -c /tmp/base.txt -c /tmp/rest.txt ${WITH}; } \
    && rm /tmp/base.txt /tmp/rest.txt

CMD ["bash"]
