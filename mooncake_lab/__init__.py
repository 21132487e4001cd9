"""mooncake_lab: run the Mooncake paper.

The package by floors, each importing only from those below it. What only the book needs is in `book`:

    cli                                              commands of the shell
    course                                           assignments, and their grading in a sandbox
    book.rendering                                   executes notebooks, checks statements, renders pages
    book.chapters · book.playground                  a folder for each chapter; the simulator in a page
    calibrate                                        measures a server, and fits the simulator to it
    book.figures · book.experiments · book.testbeds  style; parameters and results; the papers' machines
    metrics · book.paper · bench                     from logs to numbers; facts and claims; measurements here
    simulation · serving                             the two runtimes: in virtual time, and live
    cluster                                          the states of a request, for both runtimes
    compression                                      methods that shrink KVCache
    engine                                           the model: prefill and decode on CPU and GPU
    conductor · batching · store · workload          placement; what an instance runs next; KVCache; traces
    perf · net                                       latency models; connections between processes
    core                                             requests, block keys, records of the log
"""

__version__ = "0.1.0"
