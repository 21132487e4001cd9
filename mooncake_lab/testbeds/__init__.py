"""The machines of the papers as latency models, calibrated to what the papers print."""

from mooncake_lab.testbeds.other_nodes import node_latency
from mooncake_lab.testbeds.paper_node import paper_node_latency

__all__ = ["node_latency", "paper_node_latency"]
