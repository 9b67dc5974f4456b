#!/usr/bin/env bash
# Everything that needs GPUs, in one go: the tests on NCCL, a step beside DistributedDataParallel, the language model's epochs.
#
#   benchmarks/gpu.sh OUT_DIR DATA_DIR [GPUS]
#
# DATA_DIR holds train.txt, valid.txt and test.txt of WikiText-2. OUT_DIR gets the tests' log and results.tgz: rows and run directories.
set -uo pipefail
out=$1 data=$2 gpus=${3:-2}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
hora() { python3 -m hora "$@"; }
status=0
work=$(mktemp -d)
check() { "$@" || { echo "FAILED: $*"; status=1; }; }

python3 -c 'import sys, torch; print(sys.version.split()[0], torch.__version__, torch.cuda.get_device_name(0), torch.cuda.device_count())'
check python3 -m pytest -q -m gpu tests/gpu -p no:cacheprovider --timeout 200 > "$out/tests.log" 2>&1
tail -n 15 "$out/tests.log"
counts=$(for n in 1 2 4; do [ "$n" -le "$gpus" ] && echo "$n"; done)
for n in $counts; do
  check hora run -np "$n" benchmarks/step.py --json "$work/step-h100-$n.json"
done
for config in small medium; do
  for n in $counts; do
    check hora train lm --config "$config" --data "$data" --nproc "$n" --set epochs=2 --run-dir "$work/lm-$config-$n" --json "$work/lm-$config-h100-$n.json"
  done
done
rm -rf "$work"/lm-*/checkpoints
tar czf "$out/results.tgz" -C "$work" .
exit $status
