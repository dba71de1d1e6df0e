"""`leeway plan`: what a run would do under another budget, split or policy, before it is started.

| file | what it holds |
|---|---|
| `profile.py` | what is fed in: distributions of lengths and times, both clusters' sizes, faults |
| `profiles/` | published ones |
| `recorded.py` | the profile of a run that has been |
| `workload.py` | draws of a profile: what one answer is made of |
| `fleet.py` | nodes in virtual time |
| `simulation.py` | both sides of the real ledger in virtual time |
| `outcome.py` | what a simulation measures |
| `questions.py` | what people ask: the budget, the split, the policies, the price |
| `report.py` | answers as tables and pictures |
"""
