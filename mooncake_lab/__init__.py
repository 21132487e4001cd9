"""mooncake_lab: run the Mooncake paper.

The package by floors, each importing only from the floors below it:

    cli                                    the same things from a shell
    course                                 assignments and their confined grading
    batch                                  notebooks executed with papermill, pages rendered
    chapters · playground                  a folder per chapter: experiment, claims, figures; a page that simulates
    figures · experiments · testbeds       how all figures look; how all experiments run; the papers' machines
    metrics · paper · bench                log -> numbers; what the papers say; measuring this machine
    simulation · serving                   the cluster in virtual time (simpy); the same cluster, live
    compression                            smaller KVCaches (torch)
    engine                                 the real model: prefill and decode (torch)
    conductor · batching                   who serves which request; what an instance runs next
    store · workload                       what is kept; what arrives
    perf                                   how long things take
    core                                   the nouns
"""

__version__ = "0.1.0"
