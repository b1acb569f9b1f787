"""The parts of `accelerator_report`: what they measure, children, the page."""
