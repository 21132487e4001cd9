"""The machines of the papers as latency models, calibrated to what the papers print."""

from mooncake_lab.testbeds.nodes import node_latency, paper_node_latency

__all__ = ["node_latency", "paper_node_latency"]
