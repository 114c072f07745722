"""A tool-use task: a model learns to call a calculator. A tiny one, on one CPU, or a chat model of your own."""
