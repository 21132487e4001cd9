"""A cluster from flat settings: those of the spec, and those that only one runtime has."""

from dataclasses import fields

from mooncake_lab.cluster import ClusterSpec
from mooncake_lab.simulation import Cluster, SimulationOptions


def options_of(kind, settings):
    """The options of a runtime among settings, taken out of them."""
    return kind(**{each.name: settings.pop(each.name) for each in fields(kind) if each.name in settings})


def disaggregated(model, **settings):
    """A simulated cluster of separate pools."""
    options = options_of(SimulationOptions, settings)
    return Cluster(ClusterSpec.disaggregated(**settings), model, options)


def coupled(model, **settings):
    """A simulated cluster of coupled instances."""
    options = options_of(SimulationOptions, settings)
    return Cluster(ClusterSpec.coupled(**settings), model, options)


def live(**settings):
    """The spec and the options of a small live cluster, of coupled workers where there are `coupled_nodes`."""
    from mooncake_lab.serving import (
        LiveOptions,  # takes seconds to import, which tests of the simulation do not need
    )

    options, nodes = options_of(LiveOptions, settings), settings.pop("coupled_nodes", 0)
    if nodes:
        return ClusterSpec.small_coupled(nodes=nodes, **settings), options
    return ClusterSpec.small(**settings), options
