"""The models: the DFlash drafter, the frozen target, masks, loss, decoding and export."""
