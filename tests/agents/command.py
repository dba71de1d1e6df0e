"""A program that knows nothing but two environment variables and where to rate itself."""

import json
import os
import sys
import urllib.request


def post(url: str, body: object) -> dict:
    key = os.environ["OPENAI_API_KEY"]
    request = urllib.request.Request(
        url,
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


task = json.loads(os.environ["LEEWAY_TASK"])
if sys.argv[1] == "fails":
    sys.exit("no luck")
answer = post(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    {"model": "m", "messages": task["messages"]},
)
post(os.environ["LEEWAY_SESSION_URL"] + "/rewards", {"turn": answer["id"], "reward": 0.5})
