"""The gateway: agents' HTTP requests in, exact trajectories out.

`conversation` is the pure core (what was sampled, as a graph of answers), `sessions` asks the
engine, `openai_chat`, `openai_responses`, `openai_completions` and `anthropic_messages` speak one
wire dialect each, and `server` puts them on HTTP.
"""
