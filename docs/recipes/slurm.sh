#!/usr/bin/env bash
# One node of a SLURM cluster. Submit it with `sbatch docs/recipes/slurm.sh` from the repository, after `make setup` on the
# login node (a shared file system is assumed). It asks to be put back into the queue when its time is up or its node is taken
# away; finished shards and checkpoints are found then, not computed.
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
# ends; dvc itself must live until then, for a stage whose dvc is gone is killed at once. Then back into the queue.
again() {
  echo "time is up: saving and going back into the queue"
  pkill -TERM -P "$work" || true
  wait "$work" || true
  if [ -n "${SLURM_JOB_ID:-}" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
  exit 0
}

eagle3dvc node
SHELL=/bin/bash dvc repro --allow-missing &  # bash -c becomes the stage itself: no shell in between that would swallow TERM
work=$!
trap again TERM
wait "$work"
dvc status -q
dvc push
eagle3dvc report
