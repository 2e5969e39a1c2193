"""The console in a browser: Debian's Chromium, driven by Playwright (`make test-console`)."""
