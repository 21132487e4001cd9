"""mooncake_lab: run the Mooncake paper.

The package by floors, each importing only from the floors below it:

    cli                                      commands of the shell
    course                                   assignments, and their grading in a sandbox
    batch                                    executes notebooks with papermill, checks statements, renders pages
    chapters · playground                    a folder for each chapter; the simulator in a page
    calibrate                                measures a server, and fits the simulator to it
    figures · experiments · testbeds         style; parameters and results; the papers' machines
    metrics · paper · bench                  from logs to numbers; facts and claims; measurements here
    simulation · serving                     the two runtimes: in virtual time, and live with worker processes
    cluster                                  the states of a request, for both runtimes; what a cluster consists of
    compression                              methods that shrink KVCache
    engine                                   the model: prefill and decode on CPU and GPU
    conductor · batching · store · workload  placement and admission; what an instance runs next; KVCache; traces
    perf · net                               latency models; connections between processes
    core                                     requests, block keys, records of the log
"""

__version__ = "0.1.0"
