"""The console: a web page that shows queues, workers and single requests, and what feeds it."""
