"""A tool-use task: sums too large for the head, and a calculator. For a chat model of your own."""
