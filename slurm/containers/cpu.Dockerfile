# The CPU environment that the tests run in, as an image: for trials, continuous integration and reward functions.
#
#   docker build -f slurm/containers/cpu.Dockerfile -t reinforce_rl:cpu .
#
# Built from the repository's root. Python 3.11, since constraints/cpu-py311.txt was frozen there.
FROM python:3.11-slim-bookworm

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    GOMP_SPINCOUNT=0 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

WORKDIR /opt/reinforce_rl
COPY constraints/cpu-py311.txt constraints/
# torch alone comes from its own index: the CPU build is gigabytes smaller than PyPI's. Its own layer, since it is the
# largest and changes least.
RUN python -m pip install --no-deps --index-url https://download.pytorch.org/whl/cpu \
    -c constraints/cpu-py311.txt torch

COPY pyproject.toml README.md ./
COPY reinforce_rl reinforce_rl
COPY examples examples
COPY conf conf
COPY slurm slurm
RUN python -m pip install -c constraints/cpu-py311.txt -e '.[demo,tensorboard,vader,wandb]' && python -m pip check

# A job's tasks are started by `srun`, which names the program; by hand it is a shell with everything in place.
CMD ["bash"]
