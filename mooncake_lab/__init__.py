"""mooncake_lab: run the Mooncake paper.

The package by floors, each importing only from the floors below it:

    cli                                    the same things from a shell
    exercises                              the classroom: contracts, assignments, confined grading
    batch                                  notebooks executed with papermill
    figures · experiments                  one topic, one stem, everywhere
    metrics · paper · bench                log -> numbers; what the papers say; measuring this machine
    simulation · serving                   the cluster in virtual time; the same cluster, live
    compression                            smaller KVCaches (torch)
    engine                                 the real model: prefill and decode (torch)
    conductor · batching                   who serves which request; what an instance runs next
    store · workload                       what is kept; what arrives
    perf                                   how long things take
    core                                   the nouns
"""

__version__ = "0.1.0"
