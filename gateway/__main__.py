"""`python -m gateway`: one gateway process, configured by LAPS_SD_* variables."""

from laps_sd.service.interrupts import end_at_ctrl_c

if __name__ == "__main__":
    end_at_ctrl_c()

from laps_sd.service.extras import needs

with needs("gateway"):
    from gateway.app import serve
    from gateway.settings import GatewaySettings
    from laps_sd.service.serving import main

if __name__ == "__main__":
    main("gateway", GatewaySettings, serve)
