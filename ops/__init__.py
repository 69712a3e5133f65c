"""The ops of ascend_deep, one family per file, and the table that registers them."""
