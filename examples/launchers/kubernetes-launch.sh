#!/usr/bin/env bash
# Fills kubernetes.yaml in for one start of a job: FOLDER LAUNCH PROCESSES. The folder is one that the pods see under the
# same path. The network is closed first: without its policy no pod starts. With PRINT=1 it prints what it would hand to
# kubectl.
set -euo pipefail
folder=$1 launch=$2 processes=$3
case $folder$launch$processes in *[!A-Za-z0-9/._-]*) echo "unexpected characters in: $*" >&2; exit 2 ;; esac
here=$(dirname "$0")
filled=$(sed -e "s|@FOLDER@|$folder|g" -e "s|@LAUNCH@|$launch|g" -e "s|@PROCESSES@|$processes|g" "$here/kubernetes.yaml")
if [[ ${PRINT:-} ]]; then printf '%s\n' "$filled"; exit; fi
kubectl apply -f "$here/kubernetes-network.yaml"
kubectl apply -f - <<<"$filled"
