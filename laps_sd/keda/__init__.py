"""Generated stubs of KEDA's contract for external scalers: `make protos`."""
