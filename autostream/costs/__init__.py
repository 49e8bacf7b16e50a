"""The cost model: how long each op takes, estimated from its FLOPs and bytes or measured on the device."""
