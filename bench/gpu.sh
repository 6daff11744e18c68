#!/usr/bin/env bash
# Every figure that needs a GPU. Two lanes: what is timed, and making a drafter for the serving figures, which is not. With two GPUs each
# lane has one, and the second is stopped while both GPUs are timed; with one GPU it is stopped while anything is timed. Each benchmark
# has a log and a JSON file in OUT; OUT/progress says what began and ended, when, how. The most important comes first: stop it when time
# ends.
# Some 110 GB in /dev/shm and 5 GB in OUT.
#
#   bench/gpu.sh OUT [VERIFIER PROMPTS.jsonl ...]        # SKIP="train walk" leaves out what is not wanted, by the logs' names
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
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0  # which compiles for 90 s
python=${PYTHON:-python}
export out verifier python
gpus=$(nvidia-smi -L | grep -c GPU)
shm=/dev/shm
rm -rf $shm/own
rm -rf "$out/drafter" "$out/own-answers.json"  # of an earlier call
begun=$(date +%s)
export shm begun

# one NAME SECONDS GPUS COMMAND...: its log, its limit, its place in OUT/progress
one() {
  local name=$1 limit=$2 devices=$3 rc at
  shift 3
  case " ${SKIP:-} " in *" $name "*) return 0 ;; esac
  at=$(date +%s)
  echo "$((at - begun)) s: $name begins on GPU $devices" >>"$out/progress"
  CUDA_VISIBLE_DEVICES=$devices timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
  rc=$?
  echo "$(($(date +%s) - begun)) s: $name ended with $rc after $(($(date +%s) - at)) s" >>"$out/progress"
  eval "${BENCH_AFTER:-}"  # also where it was killed while the other lane stood still
  return $rc
}

muon() {
  one muon 120 "$1" "$python" bench/muon.py
}

training() {
  one train 560 "$1" "$python" bench/train.py --data $shm/train --profile 4 --json "$out/train.json"
}

llama() {
  one extract-llama-8b 540 "$1" "$python" bench/extract.py --shape llama-8b --samples 3840 --profile 480 --modes prefill,ours,stock \
    --memory 0.5 --kv-cache 50 --out $shm/a --json "$out/extract-llama-8b.json"
}

deepseek() {
  one extract-deepseek-v3 540 "$1" "$python" bench/extract.py --shape deepseek-v3 --samples 2048 --shard 50 --in-flight 12 --profile 480 \
    --memory 0.8 --out $shm/b --json "$out/extract-deepseek-v3.json"
}

walk() {
  one walk 280 "$1" "$python" bench/walk.py
}

# two GPUs against one at the same batch a step
share() {
  one "train-$1" 300 "$2" "$python" bench/train.py --data $shm/train --only ours --gpus "$1" --accumulate 8 --steps 14 --skip 6 \
    --json "$out/train-$1.json"
}

# drafter GPU PROMPTS...: learns the verifier's own answers, to questions of its own and to pairs of the files' questions. Its limits
# count the time that it stands still.
drafter() {
  local gpu=$1
  shift
  [ -n "$verifier" ] || return 0
  until [ -e "$verifier/config.json" ]; do
    [ -e "$out/no-verifier" ] && return 0
    sleep 1
  done
  one questions 500 "$gpu" "$python" bench/questions.py --verifier "$verifier" --count 28000 --out "$out/questions.jsonl" \
    --engine-args '{"kv_cache_memory_bytes": 12000000000, "max_num_seqs": 1024, "gpu_memory_utilization": 0.2}'
  one own-answers 1500 "$gpu" "$python" bench/own_answers.py --verifier "$verifier" --prompts "$@" --engine vllm \
    --questions "$out/questions.jsonl" --samples 2000 --steps 2500 --max-new-tokens 160 \
    --set train.tokens_per_batch=8192 train.learning_rate=8e-4 train.draft_vocab_size=32000 --work $shm/own \
    --keep "$out/drafter" --json "$out/own-answers.json"
}

# serve NAME GPU [ARGUMENTS...]
serve() {
  local name=$1 gpu=$2
  shift 2
  one "$name" 480 "$gpu" "$python" bench/serve.py --verifier "$verifier" --drafter "$out/drafter" --prompts $shm/own/prompts/heldout/*.jsonl \
    --draft-tokens 1 2 3 --logs "$out/$name-logs" --json "$@"
}

# vLLM's second model runner: its default for many models, for all from 0.32 on
serving() {
  VLLM_USE_V2_MODEL_RUNNER=1 serve serve "$1" --batch-sizes 1 8
}

# its first, and no CUDA graphs
serving_others() {
  VLLM_USE_V2_MODEL_RUNNER=0 serve serve-v1 "$1" --draft-tokens 3
  serve serve-eager "$1" --draft-tokens 3 --engine-args '{"enforce_eager": true}'
}

if [ "$verifier" ]; then
  export -f one drafter serve serving
  gpu=$((gpus >= 2))
  setsid bash -c 'drafter "$@" && { [ "$1" = 0 ] || serving "$1"; }' lane $gpu "${prompts[@]}" &
  other=$!
  stop="pkill -STOP -s $other" go="pkill -CONT -s $other"
  [ "$gpus" -ge 2 ] || export BENCH_BEFORE=$stop BENCH_AFTER=$go
fi
muon 0
training 0
llama 0
if [ "$gpus" -ge 2 ]; then
  share 1 0
  [ -z "$verifier" ] || export BENCH_BEFORE=$stop BENCH_AFTER=$go
  share 2 0,1
  unset BENCH_BEFORE BENCH_AFTER
  one states-tp 400 0,1 "$python" -m pytest -q -s -m gpu tests/engines/test_vllm_gpu.py
  deepseek 0
fi
unset BENCH_BEFORE BENCH_AFTER
if [ "$verifier" ]; then
  if [ "$gpus" -ge 2 ]; then
    until [ -e "$out/own-answers.json" ] || ! kill -0 $other 2>/dev/null; do sleep 1; done
  else
    wait $other
  fi
  if [ -e "$out/own-answers.json" ]; then
    [ "$gpus" -ge 2 ] || serving 0
    serving_others 0
  else
    echo "no drafter, so no serving figure" >>"$out/progress"
  fi
  wait $other
fi
walk 0
if [ "$gpus" -lt 2 ]; then
  deepseek 0
  one states 300 0 "$python" -m pytest -q -s -m gpu tests/engines/test_vllm_gpu.py
fi
echo "$(($(date +%s) - begun)) s: done" >>"$out/progress"
