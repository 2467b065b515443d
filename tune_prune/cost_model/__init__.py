"""What a search will cost, before it starts: tokens, FLOPs, seconds and memory of every stage of its plan.

tokens        what is forwarded                    counted where that is cheap, else estimated from the items
flops         what that takes in arithmetic        formulas
device_speed  how fast this machine does it        measured on one decoder layer of the model's own shapes
memory        what has to fit                      formulas
machine       what this process may use            affinity, control groups, load average, free memory of GPUs
own_process   where a GPU is asked                 so that nothing of it stays taken
estimate      all of it together, and what is left of it while the search runs
"""
