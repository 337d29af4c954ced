#!/usr/bin/env bash
# namespaces.sh FOLDER SHARED_MEMORY: process 1 of the lab's own process and mount namespaces.
# It reads commands, `up NODE` or `crash NODE`, and ends with its input, also where whoever wrote that was killed. The kernel
# then ends every process of the lab and takes its mounts away.
set -euo pipefail
folder=$1 shared_memory=$2
declare -A nodes

up() {
    # Namespaces of processes and mounts a node, so that it can die as a whole and its memory with it, and of host names.
    # The network is that of the machine, and so are the claims of its ports.
    mkdir -p "$shared_memory/$1"
    unshare --uts --mount --propagation slave --pid --fork --kill-child --mount-proc sh -c '
        set -e
        mount --rbind "$2" /dev/shm
        hostname "$1"
        slurmd -D -N "$1" &
        wait
    ' slurmd "$1" "$shared_memory/$1" </dev/null >"$folder/log/$1.out" 2>&1 &
    nodes[$1]=$!
}

crash() {
    kill -KILL "${nodes[$1]}"
    wait "${nodes[$1]}" || true
    rm -rf "${shared_memory:?}/$1"
}

# The nodes see what is mounted here later, too; the machine does not.
mount --make-rshared /
mount --bind "$folder/hosts" /etc/hosts
mount -t tmpfs -o size=16m none "$folder/small"
munged --force --socket="$folder/run/munge.sock" --key-file="$folder/run/munge.key" --pid-file="$folder/run/munged.pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/run/munge.seed"
slurmctld </dev/null
while read -r verb node; do
    case $verb in
    up) up "$node" ;;
    crash) crash "$node" ;;
    esac
done
umount -l "$folder/small"
rm -rf "$folder" "$shared_memory" || true # the daemons still write
