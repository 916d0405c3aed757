"""Private statistics of a table by the names of its columns: `dpjax.PrivateTable`."""
