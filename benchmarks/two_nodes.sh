#!/usr/bin/env bash
# benchmarks/hierarchical.py on two nodes that are network namespaces of this machine, two ranks each, joined by a virtual cable of 1 Gbit/s.
#
#   sudo benchmarks/two_nodes.sh OUT.json [OPTIONS OF hierarchical.py]
#
# Runs once with ranks placed by node (0 and 1 on the first) and once in turns (0 and 2). Needs root, `ip` and `tc`; removes what it made.
# In the environment: RATE=1gbit, PYTHON=python3.
set -euo pipefail
out=$(realpath "$1")
shift
rate=${RATE:-1gbit} python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
nodes=("hora-$$-a" "hora-$$-b") addresses=(10.213.0.1 10.213.0.2)
work=$(mktemp -d)
clean() {
  for pid in $(jobs -p); do kill "$pid" 2>/dev/null || true; done
  for node in "${nodes[@]}"; do ip netns del "$node" 2>/dev/null || true; done
  rm -rf "$work"
}
trap clean EXIT

for node in "${nodes[@]}"; do ip netns add "$node"; done
ip link add ethA netns "${nodes[0]}" type veth peer name ethB netns "${nodes[1]}"
for index in 0 1; do
  device=$([ $index = 0 ] && echo ethA || echo ethB)
  ip -n "${nodes[$index]}" addr add "${addresses[$index]}/24" dev $device
  ip -n "${nodes[$index]}" link set $device up
  ip -n "${nodes[$index]}" link set lo up
  tc -n "${nodes[$index]}" qdisc add dev $device root tbf rate "$rate" burst 256kb latency 50ms
done

# place NODE_OF_RANK_0 NODE_OF_RANK_1 ...: one run; the variables are those of torchrun, the host's name is the node's address.
place() {
  local -a seen=(0 0) pids=()
  local rank=0 node
  for node in "$@"; do
    env TORCHELASTIC_RUN_ID=bench RANK=$rank WORLD_SIZE=$# LOCAL_RANK="${seen[$node]}" LOCAL_WORLD_SIZE=2 GROUP_RANK="$node" \
      MASTER_ADDR="${addresses[0]}" MASTER_PORT=29400 \
      ip netns exec "${nodes[$node]}" unshare --uts sh -c 'hostname "$1" && shift && exec "$@"' - "${addresses[$node]}" \
      "$python" benchmarks/hierarchical.py --json "$work/$*.json" \
      --command "RATE=$rate benchmarks/two_nodes.sh hierarchical.json ${options[*]}" "${options[@]}" &
    pids+=($!)
    seen[node]=$((seen[node] + 1))
    rank=$((rank + 1))
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
}

options=("$@")
place 0 0 1 1
place 0 1 0 1
"$python" -c 'import json, sys; print(json.dumps([row for path in sys.argv[1:] for row in json.load(open(path))], indent=1))' \
  "$work"/*.json > "$work/all"
mv "$work/all" "$out"
