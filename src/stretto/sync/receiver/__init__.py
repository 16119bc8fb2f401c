"""What runs beside an engine on another host: takes parcels over HTTP and lays them where the engine reads them."""
