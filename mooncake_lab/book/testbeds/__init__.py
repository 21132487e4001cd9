"""The machines of the papers as latency models, calibrated to what the papers print."""

from mooncake_lab.book.testbeds.arxiv import arxiv_fit, arxiv_testbed, arxiv_testbed_latency
from mooncake_lab.book.testbeds.nodes import node_latency, paper_node_latency

__all__ = ["arxiv_fit", "arxiv_testbed", "arxiv_testbed_latency", "node_latency", "paper_node_latency"]
