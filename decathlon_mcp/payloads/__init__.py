"""Programs of ours that run inside sandboxes beside the driver, sent as source."""
