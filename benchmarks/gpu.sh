#!/usr/bin/env bash
# Everything that needs GPUs, in one go: the tests on NCCL, sums, a step beside DistributedDataParallel, weak scaling and its prediction, the
# language model's epochs.
#
#   benchmarks/gpu.sh OUT_DIR DATA_DIR [GPUS] [PARTS]
#   benchmarks/gpu.sh OUT_DIR DATA_DIR 8 "allreduce steps bits scale"
#
# DATA_DIR holds train.txt, valid.txt and test.txt of WikiText-2. OUT_DIR gets logs and, anew after each part, results.tgz: rows and run directories.
# PARTS: some of tests, warm (compiles what steps will need, all at once), allreduce, steps, kernels, hvd, checks, exact, bits, scale, fig4, small, medium,
# large, gentle. In the environment: COUNTS="4" for these
# numbers of ranks only, TESTS="..." for some tests only, WORKLOADS="gpt2_1" for those of steps only, VARIANTS=ddp-best,overlap likewise,
# ROUNDS=4 for so many samples of each, TO=64K for sums no larger than that, TINY=1 for tiny models in steps, scale and fig4, to try it out (on CPUs too).
set -uo pipefail
out=$(realpath "$1") data=$(realpath "$2") gpus=${3:-2} parts=${4:-tests steps checks exact small medium gentle}
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
hora() { python3 -m hora "$@"; }
status=0
# Run from the directory of the results, so that the commands in the rows name no path of this machine.
root=$PWD work=$(mktemp -d)
ln -s "$data" "$work/wikitext-2"
ln -s "$root/benchmarks" "$work/benchmarks"
cd "$work"
check() { "$@" || { echo "FAILED: $*"; status=1; return 1; }; }

python3 -c 'import sys, torch; print(sys.version.split()[0], torch.__version__, torch.cuda.device_count(), *map(torch.cuda.get_device_name, range(min(1, torch.cuda.device_count()))))'
graphs=$(nvidia-smi > /dev/null 2>&1 && echo --graphs)
counts=${COUNTS:-$(for n in 1 2 4 8; do [ "$n" -le "$gpus" ] && echo "$n"; done)}
all=$(paste -sd, <<< "${counts// /$'\n'}")
several=$(grep -vx 1 <<< "${counts// /$'\n'}" | paste -sd,)
# NAME RANKS WORDS...: one training of the language model; its rows are lm-NAME-RANKS.json.
train() {
  local name=$1 n=$2
  shift 2
  check hora train lm --data ./wikitext-2 --nproc "$n" --run-dir "lm-$name-$n" --json "lm-$name-$n.json" "$@" > "lm-$name-$n.log" 2>&1 || return 1
  grep -h "perplexity" "lm-$name-$n.log" | grep -v "step " | sed "s/^/$name, $n: /"
}

# What there is by now, for whoever has no time for the rest.
keep() {
  tar czf "$out/results.new" --exclude ./wikitext-2 --exclude ./benchmarks --exclude checkpoints . && mv "$out/results.new" "$out/results.tgz"
  echo "[$SECONDS s] $*"
}

# What is timed runs alone.
for what in $parts; do
  case $what in
    allreduce) check hora bench allreduce --ranks "$several" --from 1K --to "${TO:-1G}" $graphs --json "allreduce.json" ;;
    steps) for n in $counts; do for workload in ${WORKLOADS:-lstm_small lstm_large gpt2_1 gpt2_8 resnet50 transformer_nmt}; do
        check hora bench step --ranks "$n" --workloads "$workload" ${VARIANTS:+--variants "$VARIANTS"} ${ROUNDS:+--rounds "$ROUNDS"} ${TINY:+--tiny} --json "step-$workload-$n.json"
        keep "$workload on $n"
      done; done ;;
    warm)
      for workload in ${WORKLOADS:-gpt2_1 gpt2_8 resnet50}; do
        hora bench step --ranks "${several##*,}" --workloads "$workload" --variants single-compiled-captured --rounds 1 --steps 1 > "warm-$workload.log" 2>&1 &
      done
      wait
      ;;
    kernels) for workload in ${WORKLOADS:-lstm_small gpt2_1 resnet50}; do
        check hora run -np "${several##*,}" benchmarks/kernels.py --workload "$workload" --variants "${VARIANTS:-train-step}" --dir kernels
      done ;;
    hvd) for n in $counts; do check hora run -np "$n" benchmarks/hvd.py ${TINY:+--tiny} --json "hvd-$n.json"; done ;;
    checks) for n in $counts; do check hora run -np "$n" benchmarks/checks.py --json "checks-$n.json"; done ;;
    exact) for n in $counts; do check hora run -np "$n" benchmarks/exact.py --json "exact-$n.json"; done ;;
    bits) for n in $counts; do check hora run -np "$n" benchmarks/bits.py --json "bits-$n.json"; done ;;
    scale) for model in gpt2_8 resnet50; do
        check hora scale --weak --ranks "$all" --to 64 --json "scale-$model.json" --png "scale-$model.png" \
          --dir "scale-$model" benchmarks/weak.py --workload "$model" ${TINY:+--tiny}
      done ;;
    # As the figure of torch_dist_lab: 256 images of CIFAR's shape a rank.
    fig4) for n in ${several//,/ }; do for model in vgg19 resnet110; do
        check hora compare image --config "cifar10-$model" --data synthetic --nproc "$n" --set model.batch_norm=local ${TINY:+--steps 4 --repeats 1} \
          --set "data.global_batch_size=$((${TINY:+1 +} 0 ? 4 * n : 256 * n))" --json "fig4-$model-$n.json" --png "fig4-$model-$n.png"
      done; done ;;
    small | medium | large) for n in $counts; do train "$what" "$n" --config "$what" --set epochs=2; done ;;
  esac
  keep "$what"
done
# What is compared runs side by side. `gentle`: the demo's rate, at which rounding stays rounding, one epoch of all of WikiText-2. `halves`: the
# same on one rank in two micro-batches, which shows what another order of summation alone does.
for what in $parts; do
  case $what in
    tests)
      mkdir -p tests
      (cd "$root" && printf '%s\n' ${TESTS:-tests/gpu/test_*.py} | xargs -P 6 -I FILES sh -c 'python3 -m pytest -v --tb=short -m gpu "$1" -p no:cacheprovider --timeout 200 > "$2/$(basename "$1").log" 2>&1' - FILES "$work/tests"
        failed=$?; cat "$work"/tests/*.log > "$out/tests.log"; exit $failed) &
      ;;
    gentle)
      gentle="--config small --set epochs=1 --set optimizer.lr=0.07 --set optimizer.momentum=0.9"
      for n in $counts; do train gentle "$n" $gentle & done
      CUDA_VISIBLE_DEVICES=$((gpus - 1)) train gentle-halves 1 $gentle --set data.micro_batch_size=10 &
      CUDA_VISIBLE_DEVICES=$((gpus - 1)) train small-halves 1 --config small --set epochs=2 --set data.micro_batch_size=10 &
      ;;
  esac
done
for job in $(jobs -p); do wait "$job" || status=1; done
if [ -f "$out/tests.log" ]; then
  grep -E "FAILED|ERROR|^E  " "$out/tests.log" | head -60
  grep -E "^=+ .* in .*s( |=)" "$out/tests.log"
fi
keep "all"
exit $status
