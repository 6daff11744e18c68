#!/usr/bin/env bash
# One node of a SLURM cluster (a shared file system is assumed). From the repository:
#   srun --gpus=1 make setup                        # on a GPU node: a login node without a GPU would get the CPU build of torch
#   mkdir -p logs && sbatch docs/recipes/slurm.sh   # without logs/ SLURM ends the job before its first line
# It asks to be put back into the queue when its time is up or its node is taken away; finished shards and checkpoints are found
# then, not computed.
#SBATCH --job-name=eagle3dvc
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/slurm-%j.out
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
source .venv/bin/activate

# Ten minutes before the end SLURM sends TERM to this script. Pass it to the running stage, the child of dvc, which saves and
# ends; dvc itself must live until then, for a stage whose dvc is gone is killed at once. Then back into the queue. Before the
# stages it is `eagle3dvc node` that ends, and its `dvc pull`.
work=
again() {
  echo "time is up: saving and going back into the queue"
  pkill -TERM -P "$work" || true
  if [ "$step" = node ]; then kill -TERM $work || true; fi
  wait "$work" || true
  if [ -n "${SLURM_JOB_ID:-}" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
  exit 0
}

step=node
trap again TERM
eagle3dvc node &  # bash acts on TERM while it waits, not while a command runs before it
work=$!
wait "$work"
step=repro
SHELL=/bin/bash dvc repro --allow-missing &  # bash -c becomes the stage itself: no shell in between that would swallow TERM
work=$!
wait "$work"
dvc status -q
dvc push
eagle3dvc report
echo 'now: git add dvc.lock metrics plots && git commit -m "Hero run" && git push'
