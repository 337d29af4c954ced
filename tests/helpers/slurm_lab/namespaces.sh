#!/usr/bin/env bash
# namespaces.sh FOLDER SHARED_MEMORY LOCKS: process 1 of the lab's own process and mount namespaces.
# It reads commands, `up NODE` or `crash NODE`, and ends with its input, also where whoever wrote that was killed. The kernel
# then ends every process of the lab and takes its mounts away.
set -euo pipefail
folder=$1 shared_memory=$2 locks=$3
declare -A nodes

up() {
    # A namespace of processes a node, so that it can die as a whole, and of names, so that it has its own.
    unshare --uts --mount --pid --fork --kill-child --mount-proc \
        sh -c 'hostname "$1"; slurmd -D -N "$1" & wait' slurmd "$1" </dev/null >"$folder/log/$1.out" 2>&1 &
    nodes[$1]=$!
}

mount --bind "$folder/hosts" /etc/hosts
# The network is that of the machine, and so are the locks of its ports: a folder below /dev/shm.
mkdir -p -m 1777 "$locks" "$shared_memory/${locks##*/}"
mount --bind "$locks" "$shared_memory/${locks##*/}"
mount --rbind "$shared_memory" /dev/shm
mount -t tmpfs -o size=16m none "$folder/small"
munged --force --socket="$folder/run/munge.sock" --key-file="$folder/run/munge.key" --pid-file="$folder/run/munged.pid" \
    --log-file="$folder/log/munged.log" --seed-file="$folder/run/munge.seed"
slurmctld </dev/null
while read -r verb node; do
    case $verb in
    up) up "$node" ;;
    crash) kill -KILL "${nodes[$node]}" ;;
    esac
done
umount -l "$folder/small" "$locks" /dev/shm "$shared_memory/${locks##*/}"
rm -rf "$folder" "$shared_memory" || true # the daemons still write
