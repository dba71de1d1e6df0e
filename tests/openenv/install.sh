#!/bin/sh
# The real OpenEnv, in a virtual environment of its own: its web page's pins are not ours. The server
# works without the page, so its gradio is left out.
set -eu
python3 -m venv "$1"
"$1/bin/pip" install --quiet --no-deps openenv-core==0.3.0
"$1/bin/pip" install --quiet "fastmcp>=3" fastapi uvicorn websockets requests pydantic openai
