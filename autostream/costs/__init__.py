"""What each op costs: estimated from its FLOPs and bytes, or measured on the device."""
