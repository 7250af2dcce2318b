"""Array operations: the contract and a plain torch reference of each; faster ones live below under the same name."""
