#!/usr/bin/env bash
# Everything that needs GPUs, in one go: the tests on NCCL, a step beside DistributedDataParallel, the language model's epochs.
#
#   benchmarks/gpu.sh OUT_DIR DATA_DIR [GPUS]
#
# DATA_DIR holds train.txt, valid.txt and test.txt of WikiText-2. Rows are written to OUT_DIR; copy them to benchmarks/results/.
set -uo pipefail
out=$1 data=$2 gpus=${3:-2}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
hora() { python3 -m hora "$@"; }
status=0
check() { "$@" || { echo "FAILED: $*"; status=1; }; }

python3 -c 'import sys, torch; print(sys.version.split()[0], torch.__version__, torch.cuda.get_device_name(0), torch.cuda.device_count())'
check python3 -m pytest -q -m gpu tests/gpu -p no:cacheprovider --timeout 200
for n in $(seq 1 "$gpus"); do
  [ "$n" = 3 ] || check hora run -np "$n" benchmarks/step.py --json "$out/step-h100-$n.json"
done
exit $status
