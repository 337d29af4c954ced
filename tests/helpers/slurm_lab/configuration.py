"""Configuration of the lab's daemons: slurm.conf, a hosts file and a munge key."""

from __future__ import annotations

import random
import secrets
import socket
from pathlib import Path

SERVER_NODES = ("rm0", "rm1")
ACTOR_NODES = ("act0", "act1")
NODES = SERVER_NODES + ACTOR_NODES
NODE_LOST_SECONDS = 10  # a node is down after this much silence

# Only the backfill scheduler starts heterogeneous jobs, one set of components per cycle, hence its
# short interval. `cred_expire` also delays the restart of a requeued job: two minutes by default.
SLURM_CONF = """\
ClusterName=lab
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=10
SlurmctldPort={controller_port}
StateSaveLocation={folder}/state/controller
SlurmdSpoolDir={folder}/state/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=500000,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout={node_lost_seconds}
InactiveLimit=0
KillWait=60
MessageTimeout=10
MinJobAge=3600
OverTimeLimit=0
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""
NODE = "NodeName={name} NodeAddr={address} Port={port} CPUs=8 Boards=1 SocketsPerBoard=1"
NODE += " CoresPerSocket=8 ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"


def write_configuration(folder: Path) -> Path:
    """Fill a new lab's folder and return the path of its slurm.conf.

    Two labs share no port, and rarely an address.
    """
    for name in ("run", "log", "small", "state/controller", *(f"state/{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    key = folder / "run" / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    network = f"127.{random.randint(1, 250)}.{random.randint(1, 250)}"
    addresses = {node: f"{network}.{10 + i}" for i, node in enumerate(NODES)}
    hosts = [
        f"127.0.0.1 localhost {socket.gethostname()}",
        *(f"{ip} {node}" for node, ip in addresses.items()),
    ]
    (folder / "hosts").write_text("\n".join(hosts) + "\n")
    controller_port, *ports = unused_ports(1 + len(NODES))
    nodes = [
        NODE.format(name=node, address=addresses[node], port=port)
        for node, port in zip(NODES, ports, strict=True)
    ]
    path = folder / "slurm.conf"
    values = {
        "controller_port": controller_port,
        "node_lost_seconds": NODE_LOST_SECONDS,
        "nodes": "\n".join(nodes),
    }
    path.write_text(SLURM_CONF.format(folder=folder, **values))
    return path


def unused_ports(count: int) -> list[int]:
    """Return ports outside the system's ephemeral range, at random so that labs differ."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randint(10000, 19999)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports
