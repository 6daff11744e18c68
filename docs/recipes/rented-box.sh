#!/usr/bin/env bash
# A single rented machine, from ssh to a pushed drafter. Run it on the machine, inside tmux; run it again after any failure.
#   REPOSITORY=git@host:you/eagle3dvc.git REMOTE_URL=s3://bucket/eagle3dvc PROFILE=kimi-k2.5-b300 bash rented-box.sh
# Credentials for the remote come from the environment (AWS_ACCESS_KEY_ID and so on): nothing is written to a file here.
set -euo pipefail
: "${REPOSITORY:?git address of your copy of this repository}"
: "${REMOTE_URL:?address of the DVC remote, such as s3://bucket/eagle3dvc}"
: "${PROFILE:=}" "${BRANCH:=main}" "${FOLDER:=$HOME/eagle3dvc}"

[ -d "$FOLDER/.git" ] || git clone --branch "$BRANCH" "$REPOSITORY" "$FOLDER"
cd "$FOLDER"
make setup
source .venv/bin/activate

# in .dvc/config.local, which git does not see
dvc remote add --local -f -d hero "$REMOTE_URL"
dvc remote modify --local hero verify true
dvc remote modify --local hero jobs 4

# only on the first node: a replacement finds the settings in git
if [ -n "$PROFILE" ]; then eagle3dvc profile apply "$PROFILE"; fi

export HF_HOME="${HF_HOME:-$(dirname "$PWD")/hf}"
make node
dvc repro --allow-missing
dvc status -q
dvc push
eagle3dvc report
echo "now: git add params.yaml dvc.lock metrics plots && git commit -m 'Hero run' && git push, then end the machine"
