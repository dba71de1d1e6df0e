"""New policies on their way to the rollout nodes.

publisher.py   WeightPublisher: what the trainer's loop calls; runs and watches the process below
snapshots.py   the memory that the two share
__main__.py    the broadcasting process: reads snapshots, encodes, serves
store.py       which policies are on offer, and how to get from one to the next
service.py     the WeightBroadcast service
nodes.py       who has what, since when
"""

from leeway.manifests import Canary
from trainer_service.weight_broadcast.publisher import WeightPublisher

__all__ = ["Canary", "WeightPublisher"]
