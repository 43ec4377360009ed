#!/usr/bin/env bash
# Runs a command under torchrun on two "hosts", which are network namespaces joined by a virtual cable.
# usage: two_hosts.sh PYTHON RANKS_PER_HOST SCRIPT [ARGUMENT...]      (needs the right to make namespaces)
set -euo pipefail
python=$1 ranks=$2
shift 2

first=fop-$$-a second=fop-$$-b
running=()
cleanup() {
    for process in "${running[@]}"; do kill "$process" 2>/dev/null || true; done
    ip netns del "$first" 2>/dev/null || true
    ip netns del "$second" 2>/dev/null || true
}
trap cleanup EXIT

ip netns add "$first"
ip netns add "$second"
ip link add cable netns "$first" type veth peer name cable netns "$second"
for host in "$first:10.77.0.1" "$second:10.77.0.2"; do
    ip -n "${host%%:*}" address add "${host##*:}/24" dev cable
    ip -n "${host%%:*}" link set cable up
    ip -n "${host%%:*}" link set lo up
done

number=0
for host in "$first" "$second"; do
    GLOO_SOCKET_IFNAME=cable ip netns exec "$host" "$python" -m torch.distributed.run \
        --nnodes=2 --node-rank=$number --nproc-per-node="$ranks" \
        --master-addr=10.77.0.1 --master-port=29400 "$@" &
    running+=($!)
    number=$((number + 1))
done
for process in "${running[@]}"; do wait "$process"; done
