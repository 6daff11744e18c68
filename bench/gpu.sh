#!/usr/bin/env bash
# Every figure that needs a GPU, in about 20 minutes on a machine with two (30 with one): extraction and training side by side, a
# GPU each, then what wants both. Each benchmark has a log and a JSON file in OUT; OUT/progress says what began and ended, when, how.
#
#   bench/gpu.sh OUT [VERIFIER PROMPTS.jsonl ...]
#
# VERIFIER is a folder in Hugging Face's layout for the serving figure (left out without it); it may arrive while the rest runs: it is
# waited for until OUT/no-verifier exists. To outlive a connection: setsid nohup bench/gpu.sh OUT ... &
set -uo pipefail
out=${1:?usage: bench/gpu.sh OUT [VERIFIER PROMPTS.jsonl ...]}
verifier=${2:+$(realpath -m "$2")}  # it may not be there yet
shift; [ $# -gt 0 ] && shift
prompts=("$@")
mkdir -p "$out"
out=$(cd "$out" && pwd)
for p in "${!prompts[@]}"; do prompts[p]=$(realpath "${prompts[p]}"); done
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
python=${PYTHON:-python}
gpus=$(nvidia-smi -L | grep -c GPU)
shm=/dev/shm
begun=$SECONDS

# one NAME SECONDS GPUS COMMAND...: its log, its limit, its place in OUT/progress
one() {
  local name=$1 limit=$2 devices=$3 rc at=$SECONDS
  shift 3
  echo "$((SECONDS - begun)) s: $name begins on GPU $devices" >>"$out/progress"
  CUDA_VISIBLE_DEVICES=$devices timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  echo "$((SECONDS - begun)) s: $name ended with $rc after $((SECONDS - at)) s" >>"$out/progress"
  return $rc
}

llama() {
  one extract-llama-8b 540 "$1" "$python" bench/extract.py --shape llama-8b --samples 3840 --profile 480 --modes prefill,ours,stock \
    --out $shm/a --json "$out/extract-llama-8b.json"
}

deepseek() {
  one extract-deepseek-v3 540 "$1" "$python" bench/extract.py --shape deepseek-v3 --samples 2048 --shard 50 --in-flight 12 --out $shm/b \
    --json "$out/extract-deepseek-v3.json"
}

walk() {
  one walk 280 "$1" "$python" bench/walk.py
}

training() {
  one train 560 "$1" "$python" bench/train.py --data $shm/train --profile 4 --json "$out/train.json"
}

# train-1, train-2: two GPUs against one at the same batch a step
share() {
  one "train-$1" 300 "$2" "$python" bench/train.py --data $shm/train --only ours --gpus "$1" --accumulate 8 --steps 14 --skip 6 \
    --json "$out/train-$1.json"
}

serving() {
  [ -n "$verifier" ] || return 0
  until [ -e "$verifier/config.json" ]; do
    [ -e "$out/no-verifier" ] && return 0
    sleep 1
  done
  one questions 200 "$1" "$python" bench/questions.py --verifier "$verifier" --count 4000 --out "$out/questions.jsonl" \
    --engine-args '{"kv_cache_memory_bytes": 12000000000, "max_num_seqs": 1024}'
  one own-answers 540 "$1" "$python" bench/own_answers.py --verifier "$verifier" --prompts "${prompts[@]}" --engine vllm \
    --questions "$out/questions.jsonl" --samples 2000 --steps 1500 --max-new-tokens 192 --set train.learning_rate=1e-3 \
    --work $shm/own --keep "$out/drafter" --json "$out/own-answers.json"
  if [ -e "$out/drafter/config.json" ]; then
    one serve 400 "$1" "$python" bench/serve.py --verifier "$verifier" --drafter "$out/drafter" \
      --prompts $shm/own/prompts/heldout/*.jsonl --draft-tokens 3 --batch-sizes 1 8 --logs "$out" --json
  fi
}

if [ "$gpus" -ge 2 ]; then
  (llama 0; walk 0; deepseek 0) &
  (training 1; share 1 1; serving 1) &
  wait
  share 2 0,1
  one states-tp 400 0,1 "$python" -m pytest -q -s -m gpu tests/engines/test_vllm_gpu.py
else
  llama 0
  training 0
  walk 0 &  # its bound is minutes, so it may share the GPU with a training that nobody times
  serving 0
  wait
  deepseek 0
  one states 300 0 "$python" -m pytest -q -s -m gpu tests/engines/test_vllm_gpu.py
fi
echo "$((SECONDS - begun)) s: done" >>"$out/progress"
